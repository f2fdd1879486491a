"""Schedules: functions that are called by themselves.

store      the records of schedules: added, paused, removed; and the call that one makes
declared   what functions say of themselves, made into records
runs       the leader's loop: what is due is submitted, under an id that its time decides
"""
