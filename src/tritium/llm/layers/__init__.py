"""The parts of a decoder layer. They hold their weights, know their weight format and run on one device."""
