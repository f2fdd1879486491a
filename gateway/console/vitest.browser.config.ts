import { defineConfig } from "vitest/config";

/** Tests in Chromium, against a platform that tests/e2e/test_console.py has started. They share it, so they run in order. */
export default defineConfig({
  test: {
    include: ["tests/browser/*.test.ts"],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 30_000,
  },
});
