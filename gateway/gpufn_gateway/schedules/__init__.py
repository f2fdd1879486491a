"""Schedules: functions that are called at set times.

store      the schedule records: add, pause, remove; and submit the call of a schedule
declared   schedules that functions declare, turned into records
runs       the leader's loop: submit what is due, under an id derived from the schedule and its time
"""
