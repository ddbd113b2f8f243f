"""The crammed BERT and its parts."""
