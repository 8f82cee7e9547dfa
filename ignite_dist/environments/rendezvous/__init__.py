"""How ranks find each other: store, roll call, connections and keepalive, network interfaces."""
