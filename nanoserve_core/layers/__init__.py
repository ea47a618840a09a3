"""The parts a model is made of; each works on tensors it is given and keeps no state of a step."""
