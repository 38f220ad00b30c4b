"""The old way on purpose: a batch made anew from request objects every step, and a wait for every token.

The baseline to measure against and the oracle to test with. Nothing needs it: the folder may be deleted.
"""
