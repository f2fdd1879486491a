import { defineConfig } from "vitest/config";

/** `npx vitest run --config vitest.budgets.config.ts` measures first paint and script time with 10,000 functions. */
export default defineConfig({ test: { include: ["tests/budgets/*.test.ts"], testTimeout: 120_000 } });
