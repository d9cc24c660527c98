"""The console: Freshet in a browser. It uses only the gateway's API, through the Python client."""
