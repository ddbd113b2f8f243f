import sys

from bert_dp.examples.prepare import main

if __name__ == "__main__":
    sys.exit(main())
