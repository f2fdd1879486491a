-- wrk script: repeat one POST with the body from the file BENCH_BODY, and print one line of JSON that
-- benchmarks/measure.py reads.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()

done = function(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format(
        '\n{"requests": %d, "seconds": %.6f, "failed": %d, "p50_ms": %.4f, "p99_ms": %.4f}\n',
        summary.requests, summary.duration / 1e6,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout,
        latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
