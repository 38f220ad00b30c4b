"""`python -m slipstream.cli`, for trees that are not installed."""

import sys

from slipstream.cli.main import main

sys.exit(main())
