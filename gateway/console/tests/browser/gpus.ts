/** Made-up GPUs with metrics: declared GPUs report none. */

function gpu(kind: string, gib: number, busy: number, more: Readonly<Record<string, unknown>> = {}): unknown {
  return {
    kind,
    memory_bytes: gib * 2 ** 30,
    health: "healthy",
    health_reason: "",
    score: { value: 1, reasons: [], drain: false },
    parent: "",
    foreign_bytes: 0,
    workers: {},
    mode: null,
    utilisation: busy,
    memory_used_bytes: Math.round(gib * 2 ** 30 * (0.1 + 0.8 * busy)),
    temperature_c: Math.round(34 + 40 * busy),
    temperature_limit_c: 87,
    power_w: Math.round(70 + 600 * busy),
    power_limit_w: 700,
    ...more,
  };
}

function held(name: string, percent: number, gib: number): unknown {
  return { function: name, sm_percent: percent, vram_bytes: gib * 2 ** 30, charged: percent / 100, memory_bytes: gib * 2 ** 29, busy: null, parked: false };
}

function whole(name: string, busy: number): Readonly<Record<string, unknown>> {
  return { mode: "exclusive", workers: { [`w-${name}`]: { ...(held(name, 100, 0) as object), memory_bytes: 62 * 2 ** 30, busy } } };
}

const H100 = "NVIDIA H100 80GB HBM3";
const MIG = { parent: "GPU-5b1f03c2-2", temperature_c: null, power_w: null, power_limit_w: null, utilisation: null };
const shares = { "w-1": held("prod/search/rank", 25, 16), "w-2": held("prod/search/embed", 25, 16), "w-3": held("prod/ads/bid", 50, 32) };

const COMMON = { platform: "Linux x86_64", driver: "575.57.08", cuda: "12.9", clock_skew_s: 0.0004, trouble: {} };
/** A live page of nodes with GPUs that no machine has. */
export const NODES = {
  not_reporting: { "gpu-z": { since: 1_790_000_000, by: "key-1" } },
  findings: [{ severity: "critical", kind: "node", subject: "gpu-b", code: "device", title: "NVIDIA H100 80GB HBM3 is failed", text: "XID 79: the GPU has fallen off the bus" }],
  nodes: {
    "gpu-a": {
      ...COMMON,
      drained: null,
      address: "10.0.0.11",
      score: { value: 1, reasons: [], drain: false },
      mps: "v3",
      cores: 96,
      cores_reserved: 44,
      memory_bytes: 2 ** 40,
      memory_reserved_bytes: 412 * 2 ** 30,
      functions: { "prod/chat/answer": 2, "prod/search/rank": 1, "prod/search/embed": 1, "prod/ads/bid": 1 },
      gpus: {
        "GPU-1f6c9a40-1": gpu(H100, 80, 0.93, whole("prod/chat/answer", 0.93)),
        "GPU-2a70be11-1": gpu(H100, 80, 0.88, whole("prod/chat/answer", 0.88)),
        "GPU-3cd4f5e0-1": gpu(H100, 80, 0.61, { mode: "mps", workers: shares }),
        "GPU-4e982d77-1": gpu(H100, 80, 0.02, { foreign_bytes: 2 ** 31 }),
        "MIG-0aa1c3d2-1": gpu(`${H100} MIG 3g.40gb`, 40, 0.4, MIG),
        "MIG-1bb2d4e3-1": gpu(`${H100} MIG 3g.40gb`, 40, 0.1, MIG),
      },
    },
    "gpu-b": {
      ...COMMON,
      drained: null,
      address: "10.0.0.12",
      score: { value: 0.75, reasons: ["1 of its 4 GPUs should be drained"], drain: false },
      mps: "none",
      cores: 96,
      cores_reserved: 12,
      memory_bytes: 2 ** 40,
      memory_reserved_bytes: 96 * 2 ** 30,
      functions: { "prod/train/step": 3 },
      gpus: {
        "GPU-6a22c410-1": gpu(H100, 80, 0.99, whole("prod/train/step", 0.99)),
        "GPU-7b33d521-1": gpu(H100, 80, 0.97, whole("prod/train/step", 0.97)),
        "GPU-8c44e632-1": gpu(H100, 80, 0.98, whole("prod/train/step", 0.98)),
        "GPU-9d55f743-1": gpu(H100, 80, 0, { score: { value: 0, reasons: ["it is failed: XID 79: the GPU has fallen off the bus"], drain: true }, health: "failed", health_reason: "XID 79: the GPU has fallen off the bus", utilisation: null, memory_used_bytes: null, temperature_c: null, power_w: null }),
      },
    },
  },
};
