-- wrk: the same POST again and again; at the end one line of JSON that benchmarks/measure.py reads.
wrk.method = "POST"
wrk.body = '{"x": 1}'
wrk.headers["Content-Type"] = "application/json"

done = function(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format(
        '\n{"requests": %d, "seconds": %.6f, "failed": %d, "p50_ms": %.4f, "p99_ms": %.4f}\n',
        summary.requests, summary.duration / 1e6,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout,
        latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
