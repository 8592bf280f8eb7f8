"""Compares every model and layer of Keras and KerasHub on a mesh with one device: `make coverage`, docs/coverage.md.

run.py           which cases there are, and one process after another that runs them
case.py          one case: train on one device and on meshes, and compare
layer_cases.py   arguments and inputs of the layers of keras.layers
application_cases.py   the models of keras.applications
hub_cases.py     the backbones of keras_hub, each with a task's head
hub_sizes.py     their tiny sizes
hub_composed.py  the same for those that are made from other models
page.py          docs/coverage.md
"""
