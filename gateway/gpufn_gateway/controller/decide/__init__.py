"""The decisions of one controller step. Pure.

scaling/  how many workers each revision gets, and when calls move to the next one
room/     the shares of new workers, and the workers that leave, park or move for them
"""
