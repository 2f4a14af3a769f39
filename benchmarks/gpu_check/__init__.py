"""What `scripts/gpu_check` runs: one prepared check of one GPU, in parts that each have a share of the time.

    main        the order of the parts, the time each may take            imports nothing but the standard library
    workers     a part's cases in processes of their own, watched         the same
    lines       what is said of each case; table, JSON, exit status       the same
    worker      the process that runs cases: environment, limits, engine, speed (decode, prefill, tune)
    suite       the conformance suite, spread over several processes

Whatever needs a GPU runs in a worker, so that a kernel that hangs or breaks the device costs a case and not the run.
"""
