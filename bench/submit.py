"""How fast jobs are taken in, and how fast media are shown however many jobs there are.

    make bench        or        python bench/submit.py [--quick] [--rounds N]

What is measured, and how, is told in bench/submitting/.
"""

from submitting.main import main

if __name__ == "__main__":
    main()
