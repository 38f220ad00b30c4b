"""One file an architecture. Models are maths with arguments: no ambient context, no state that a step
changes."""
