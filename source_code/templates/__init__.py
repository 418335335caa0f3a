"""What copy_template.py is made of: a folder, or one file, from a training script of the course."""
