"""Export to TFLite: graphs for the phone, lowering, quantisation, checks, bundle and a runner."""
