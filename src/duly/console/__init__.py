"""The operator's pages: server-rendered, readable without JavaScript."""
