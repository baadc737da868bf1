"""How fast jobs are taken in, and how fast media are shown however many jobs there are.

    make bench        or        python bench/submit.py [--quick] [--rounds N] [--check]

The measurements are described in bench/submit_load/.
"""

import sys

from submit_load.main import main

if __name__ == "__main__":
    sys.exit(main())
