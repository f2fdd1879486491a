import { defineConfig } from "vite";

export default defineConfig({
  base: "/console/",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../gpufn_gateway/console/assets",
    emptyOutDir: true,
    assetsDir: "static",
    assetsInlineLimit: 0, // the content security policy allows no data: addresses
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
});
