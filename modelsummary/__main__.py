"""``python -m modelsummary``."""

from modelsummary.cli import main

if __name__ == "__main__":
    main()
