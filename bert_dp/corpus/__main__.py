import sys

from bert_dp.corpus.builder import main

if __name__ == "__main__":
    sys.exit(main())
