"""`python -m tfpar.servers` runs a worker or a parameter server."""

from tfpar.servers import server

if __name__ == "__main__":
    server.main()
