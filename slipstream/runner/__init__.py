"""The V2 runner: step(), lanes, memory plan. Knows no scheduler."""
