"""The bus: everything between gpufn's processes goes through this package, the only one that knows NATS.

embedded    the nats-server that `gpufn up` starts, and the check of any server
connection  one Bus per process: publish, subscribe, request, JetStream requests; reconnects for ever
streams     the streams for invocations, results and logs
consumer    the pull loop: takes from a queue exactly as many deliveries as credits were granted
kv, leases  records with compare-and-set, watches; who leads
objects     blobs named by their digest
"""
