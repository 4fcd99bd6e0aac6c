"""What a model is given to read: texts, tasks with answers, and the split between them."""
