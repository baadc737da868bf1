"""Measures how fast jobs are submitted, and how fast media are listed while there are many jobs.

    make bench        or        python bench/submit.py [--quick] [--rounds N] [--check]

The measurements are described in bench/submit_load/.
"""

import sys

from submit_load.main import main

if __name__ == "__main__":
    sys.exit(main())
