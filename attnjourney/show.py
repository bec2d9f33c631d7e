"""python -m attnjourney.show: attnjourney/demo/show.py."""

import sys

from .demo.show import main

if __name__ == "__main__":
    sys.exit(main())
