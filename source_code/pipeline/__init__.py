"""What the course's scripts share. Each file is one idea; imports run one way, from the scripts down."""
