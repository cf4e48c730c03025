"""Gets files by HTTP and compares each with its name, which is its SHA-256: fetch.py HOST PORT REQUESTS NAME ..."""
import ctypes
import hashlib
import http.client
import socket
import sys


def connect(address, timeout, source):
    """socket.create_connection, but with a socket that librspreload of rdma-core 56 takes: without SOCK_CLOEXEC."""
    fd = ctypes.CDLL(None, use_errno=True).socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    s.connect(address)
    return s


host, port, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = sys.argv[4:]
per_connection = 50  # also shows many connections, one after the other
connection, total = None, 0
for i in range(requests):
    if i % per_connection == 0:
        if connection:
            connection.close()
        connection = http.client.HTTPConnection(host, port)
        connection._create_connection = connect
    name = names[i % len(names)]
    connection.request("GET", "/" + name)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200 or hashlib.sha256(body).hexdigest() != name:
        sys.exit("request %d: status %d, %d bytes that do not match %s" % (i, response.status, len(body), name))
    total += len(body)
connection.close()
print(requests, "requests,", total, "bytes")
