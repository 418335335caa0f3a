"""The guard: surrounds a program's main() and keeps its user from harm."""
