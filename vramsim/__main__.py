"""`python -m vramsim`: the same as the console script `vramsim`."""

from simulator.cli import main

if __name__ == "__main__":
    main()
