"""What a verb has to say, as a value, and how the console and a page show it."""
