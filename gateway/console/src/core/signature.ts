/** A form for the arguments of a call, from the JSON Schema of its parameters. Pure. */

import type { Json } from "./delta";

export type Schema = { readonly [key: string]: Json };

export type FieldKind = "text" | "integer" | "number" | "boolean" | "choice" | "json";

export interface Field {
  readonly name: string;
  readonly kind: FieldKind;
  readonly isRequired: boolean;
  /** The type as the signature has it: "integer or null". */
  readonly type: string;
  readonly choices: readonly string[];
  readonly initial: string;
  readonly description: string;
}

export function fieldsOf(parameters: Schema): Field[] {
  const required = Array.isArray(parameters["required"]) ? parameters["required"] : [];
  return Object.entries(schemaIn(parameters["properties"])).map(([name, value]) => {
    const schema = resolved(schemaIn(value), parameters);
    const choices = Array.isArray(schema["enum"]) ? schema["enum"].map(textOf) : [];
    const hasDefault = schema["default"] !== undefined;
    return {
      name,
      kind: choices.length ? "choice" : kindOf(schema),
      isRequired: required.includes(name),
      type: typeOf(schema),
      choices,
      initial: hasDefault ? textOf(schema["default"] ?? null) : "",
      description: typeof schema["description"] === "string" ? schema["description"] : "",
    };
  });
}

/** Return the arguments of the texts that were typed in. An empty text of an optional field is left out. Throws SyntaxError. */
export function argumentsFrom(fields: readonly Field[], texts: Readonly<Record<string, string>>): Record<string, Json> {
  const found: Record<string, Json> = {};
  for (const field of fields) {
    const text = texts[field.name] ?? "";
    if (text !== "" || (field.isRequired && field.kind === "text")) {
      found[field.name] = valueOf(field, text);
    } else if (field.isRequired) {
      throw new SyntaxError(`${field.name}: a value is required`);
    }
  }
  return found;
}

function valueOf(field: Field, text: string): Json {
  switch (field.kind) {
    case "text":
      return text;
    case "boolean":
      return text === "true";
    case "integer":
    case "number": {
      const value = Number(text);
      if (!Number.isFinite(value) || (field.kind === "integer" && !Number.isInteger(value))) {
        throw new SyntaxError(`${field.name}: ${text} is no ${field.kind}`);
      }
      return value;
    }
    case "choice":
      return field.type === "string" ? text : parsed(field, text);
    case "json":
      return parsed(field, text);
  }
}

function parsed(field: Field, text: string): Json {
  try {
    return JSON.parse(text) as Json;
  } catch {
    throw new SyntaxError(`${field.name}: write a value as JSON, such as [1, 2] or {"a": true}`);
  }
}

function kindOf(schema: Schema): FieldKind {
  switch (schema["type"]) {
    case "string":
      return "text";
    case "integer":
    case "number":
    case "boolean":
      return schema["type"];
    default:
      return "json";
  }
}

function typeOf(schema: Schema): string {
  const { type } = schema;
  if (typeof type === "string") {
    return type === "array" ? `array of ${typeOf(schemaIn(schema["items"]))}` : type;
  }
  const options = schema["anyOf"];
  return Array.isArray(options) ? options.map((each) => typeOf(schemaIn(each))).join(" or ") : "any";
}

function resolved(schema: Schema, root: Schema): Schema {
  const reference = schema["$ref"];
  if (typeof reference !== "string" || !reference.startsWith("#/$defs/")) {
    return schema;
  }
  return schemaIn(schemaIn(root["$defs"])[reference.slice("#/$defs/".length)]);
}

function schemaIn(value: Json | undefined): Schema {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Schema) : {};
}

function textOf(value: Json): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}
