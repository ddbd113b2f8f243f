import sys

from bert_dp.data.build import main

if __name__ == "__main__":
    sys.exit(main())
