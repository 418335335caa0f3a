"""What is wrong on purpose: the code behind the scripts whose names begin with broken_."""
