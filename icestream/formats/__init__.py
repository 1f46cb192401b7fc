"""Record formats: the bytes of records become columns, whatever brought the records here.

A record passes these modules from top to bottom:

| module | promise |
|---|---|
| `options` | what a pipeline file may say about records |
| `decoding` | in which format records are, and which decoder reads them |
| `envelope` | what records mean: plain rows or Debezium's changes |
| `registry`, `registered`, `payloads` | schemas of a registry, and records grouped by theirs |
| `json_cells`, `json_columns`, `json_fields` | JSON as cells, their types, and fields of records |
| `json_grammar`, `json_cutting` | kernels that check JSON, and those that cut what was checked |
| `connect`, `binary_texts` | JSON with Kafka Connect's schemas, and its bytes and exact numbers |
| `avro`, `protobuf` with their kernels | schemas as programs or tables that compiled loops run |
| `wire`, `columns`, `arrow_fields` | what both of these share: values, words, fields |
| `rows`, `text_fields` | what all formats answer with: records, rows and fields |

Nothing here imports a source. Kafka and CockroachDB use it; words of theirs stand in options and
reasons alone.
"""
