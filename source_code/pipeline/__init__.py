"""What the scripts share. A schedule is data: simulator.py predicts it, worker.py performs it.

The files beside this one are what the scripts of lessons 01 to 03 need. A folder is a topic, which
builds on them. Each file is one idea; imports run one way, from the scripts down to message.py.
"""
