"""gRPC's server side over HTTP/2, for the event loop: what carries calls, whatever their methods mean."""
