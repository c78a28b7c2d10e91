"""`python -m simulator.recording REQUEST`: the process of `simulator.recording.process`."""

import sys

from simulator.recording.process import main

sys.exit(main(sys.argv[1]))
