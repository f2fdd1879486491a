"""Composition of the gateway: its objects, and the arguments of each.

services      connections and stores, opened in order
parts         objects built on them
routes        routes of the management API and the protocols
application   the ASGI application, with the console and gRPC
background    tasks that run until the gateway ends
"""
