import { render } from "preact";
import { App } from "./ui/app";
import { applyTheme } from "./ui/theme";

applyTheme();
const root = document.getElementById("app");
if (root !== null) {
  render(<App />, root);
}
