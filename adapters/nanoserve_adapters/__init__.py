"""What every framework needs between itself and the core; it knows no framework.

    engine_thread   EngineThread: one thread owns one engine; submit, stream, astream, cancel, call
    streams         what `stream` and `astream` return
    sink            the protocols on both sides of the thread, for an adapter with its own delivery
    registry        acquire: one engine per model in a process, by counted handles
    unsupported     one policy for options that are not honoured: fall back, or refuse
    testing         FakeEngine, tiny models and the AdapterContract tests

Import from the modules.
"""
