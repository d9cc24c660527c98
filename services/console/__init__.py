"""The console: Freshet in a browser. It knows the gateway's API alone, through the Python client."""
