use super::*;

fn said(text: &[u8]) -> String {
    let faults = Faults::new();
    let read = read(text, &faults);
    match (read, faults.settle("f.yaml")) {
        (Err(error), _) => error.to_string(),
        (_, Err(errors)) => errors.to_string(),
        (Ok(node), Ok(())) => format!("read {}", node.describe()),
    }
}

#[test]
fn values_know_their_place_and_path() {
    let root = read(b"# a comment\nmodel:\n  layers: 4\nlist: [1, \"2\", ~]\n", &Faults::new()).unwrap();
    let layers = root.get("model").unwrap().get("layers").unwrap();
    assert_eq!((layers.path(), layers.place()), ("model.layers", Place { line: 3, column: 11 }));
    assert_eq!(root.entries().unwrap()[1].place, Place { line: 4, column: 1 });
    let list = root.get("list").unwrap().items().unwrap();
    assert_eq!(list[1].scalar(), Some(&Scalar { text: "2".into(), quoted: true }));
    assert_eq!((list[2].value(), list[2].path()), (&Value::Null, "list[2]"));
}

#[test]
fn what_is_no_document_is_refused() {
    assert_eq!(said(b""), "the file is empty; see specs/quickstart.yaml for a spec");
    assert_eq!(said(b"# only a comment\n"), "the file is empty; see specs/quickstart.yaml for a spec");
    assert_eq!(said(b"a: 1\n---\nb: 2\n"), "2:1: a second document begins here; a spec is one document");
    assert_eq!(
        said(b"- 1\n- 2\n"),
        "1:1: the spec: expected a map of keys such as `model` and `resources`, got a list of 2"
    );
    assert_eq!(said(b"a: 1\nb: \xff\n"), "2:4: not UTF-8 text; is this a YAML file?");
    assert!(said(b"a: [1, 2\n").starts_with("1:4: not YAML: "), "{}", said(b"a: [1, 2\n"));
    assert!(said(b"a: 1\n b: 2\n").contains("not YAML: "), "{}", said(b"a: 1\n b: 2\n"));
    assert_eq!(said(b"%YAML 1.2\n---\na: 1\n").split(": ").nth(1), Some("not YAML"));
    let large = vec![b'#'; MAX_BYTES + 1];
    assert_eq!(said(&large), "expected at most 1048576 bytes, got more; a spec is a short text");
}

#[test]
fn duplicate_keys_name_both_lines() {
    assert_eq!(
        said(b"a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n"),
        "f.yaml:5:3: b.c: given twice; the first is on line 3\nf.yaml:6:1: a: given twice; the first is on line 1"
    );
}

#[test]
fn only_words_are_keys() {
    assert_eq!(said(b"? [a, b]\n: 1\n"), "1:3: expected a word as key, got a map or list");
    assert_eq!(said(b"a: &x 1\n*x : 2\n"), "2:1: expected a word as key, got an alias");
    assert_eq!(said(b"a: &x {b: 1}\nc:\n  <<: *x\n"), "3:3: merge keys are not read; write the keys out");
    assert_eq!(said(b": 1\n"), "1:1: expected a key of 1 to 64 bytes");
    assert_eq!(said(b"a: !!int 1\n"), "1:10: tags are not read; write the value alone");
    let long = format!("{}: 1\n", "k".repeat(65));
    assert_eq!(said(long.as_bytes()), "1:1: expected a key of 1 to 64 bytes");
}

#[test]
fn aliases_are_copies_and_are_paid_for() {
    let root = read(b"a: &x {n: 1}\nb: *x\n", &Faults::new()).unwrap();
    assert_eq!(root.get("b").unwrap().get("n").unwrap().path(), "b.n");
    assert!(said(b"a: *nothing\n").contains("not YAML"), "{}", said(b"a: *nothing\n"));
    assert_eq!(said(b"a: &x [*x]\n"), "1:8: an alias inside the value that it repeats");
    // Nine levels of nine: a billion values, had they been built.
    let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_string();
    for n in 1..10 {
        let copies = vec![format!("*a{}", n - 1); 9].join(", ");
        laughs.push_str(&format!("a{n}: &a{n} [{copies}]\n"));
    }
    assert!(said(laughs.as_bytes()).ends_with("more than 10000 values, aliases written out"));
    // One long text, many times.
    let long = format!("a: &a {}\nb: [{}]\n", "t".repeat(100_000), vec!["*a"; 100].join(", "));
    assert!(said(long.as_bytes()).ends_with("more than 2097152 bytes of text, aliases written out"));
}

#[test]
fn depth_is_bounded_however_it_is_reached() {
    let deep = format!("a: {}{}\n", "[".repeat(100_000), "]".repeat(100_000));
    assert!(said(deep.as_bytes()).contains("inside one another"), "{}", said(deep.as_bytes()));
    let block = (0..200).map(|n| format!("{}k:\n", " ".repeat(n))).collect::<String>();
    assert!(said(block.as_bytes()).contains("inside one another"), "{}", said(block.as_bytes()));
    let mut chain = "a0: &a0 [1]\n".to_string();
    for n in 1..40 {
        chain.push_str(&format!("a{n}: &a{n} [*a{}]\n", n - 1));
    }
    assert!(said(chain.as_bytes()).contains("inside one another"), "{}", said(chain.as_bytes()));
}
