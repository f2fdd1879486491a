"""The bus: everything between gpufn's processes goes through this package, the only one that knows NATS.

embedded    the nats-server that `gpufn up` starts, and the check of any server
connection  one Bus per process: publish, subscribe, request, JetStream requests; reconnects for ever
link, natspy, wire  the connection itself, as lean as the hot path needs it; jetstream: requests and their answers
streams, feed  the streams for invocations, results and logs; reading one from a place on
consumer    the pull loop: takes from a queue exactly as many deliveries as credits were granted
kv, leases  records with compare-and-set, watches; who leads
objects     blobs named by their digest
calls       invocations that somebody waits for
records, queued_calls, queues, dead_letters, checkpoints, maps  submitted ones: kept, found, ended
doorbells   a call was queued where nobody pulls
"""
