"""The controller of one machine: a background process that starts, watches and stops the runs of the queue.

It holds no state: all of it is in the database, and each round derives what to do from the rows and the processes that
exist. So it may be killed at any instruction, and the next one continues.
"""
