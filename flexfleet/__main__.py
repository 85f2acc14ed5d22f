"""`python -m flexfleet` is the console command, where its script is not on the path."""

from __future__ import annotations

from flexfleet.cli import main

if __name__ == "__main__":
    main()
