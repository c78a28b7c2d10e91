"""`python -m simulator`: the same as the console script `llmem`."""

from simulator.cli import main

if __name__ == "__main__":
    main()
