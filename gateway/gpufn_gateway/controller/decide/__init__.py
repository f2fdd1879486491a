"""The decisions of one controller step. Pure.

scaling/  how many workers each revision gets, and when calls move to the next one
room/     who gets room, and which workers leave, park or move for it
"""
