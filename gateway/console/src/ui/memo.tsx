/** Parts of a page that are drawn again only if one of their properties is another object. */

import { Component, type ComponentType } from "preact";

export function memo<P extends object>(Shown: ComponentType<P>): ComponentType<P> {
  return class extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const names = Object.keys(next) as (keyof P)[];
      return names.some((name) => next[name] !== this.props[name]);
    }

    override render() {
      return <Shown {...(this.props as P)} />;
    }
  };
}
