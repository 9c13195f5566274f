//! The order in which resources take part in a step: dependencies first, ties by name.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Error, ResourceName, Result};

/// Indices of `resources` (a name and what it depends on) in an order where each comes after everything it
/// depends on. The order is a function of the names alone: of those that may come next, the first by name does.
///
/// # Errors
/// [`Error::DuplicateResource`], [`Error::MissingDependency`], or [`Error::DependencyCycle`] with the whole path.
pub fn dependency_order(resources: &[(ResourceName, Vec<ResourceName>)]) -> Result<Vec<usize>> {
    let mut index = BTreeMap::new();
    for (i, (name, _)) in resources.iter().enumerate() {
        if index.insert(name, i).is_some() {
            return Err(Error::DuplicateResource { resource: name.clone() });
        }
    }
    let mut waiting: BTreeMap<&ResourceName, BTreeSet<&ResourceName>> = BTreeMap::new();
    for (name, needs) in resources {
        for needed in needs {
            if !index.contains_key(needed) {
                let known = index.keys().filter(|k| **k != name).map(|k| (*k).clone()).collect();
                return Err(Error::MissingDependency {
                    resource: name.clone(),
                    missing: needed.clone(),
                    known,
                });
            }
        }
        waiting.insert(name, needs.iter().collect());
    }
    let mut order = Vec::with_capacity(resources.len());
    while !waiting.is_empty() {
        let Some(next) = waiting.iter().find(|(_, needs)| needs.is_empty()).map(|(name, _)| *name) else {
            return Err(Error::DependencyCycle { path: cycle(&waiting) });
        };
        waiting.remove(next);
        for needs in waiting.values_mut() {
            needs.remove(next);
        }
        order.push(index[next]);
    }
    Ok(order)
}

/// A cycle among resources that all wait for another: follow first needs until a name comes twice.
fn cycle(waiting: &BTreeMap<&ResourceName, BTreeSet<&ResourceName>>) -> Vec<ResourceName> {
    let mut path: Vec<&ResourceName> = Vec::new();
    let mut next = waiting.keys().next().copied();
    while let Some(name) = next {
        if let Some(start) = path.iter().position(|seen| *seen == name) {
            path.push(name);
            return path[start..].iter().map(|n| (*n).clone()).collect();
        }
        path.push(name);
        next = waiting.get(name).and_then(|needs| needs.iter().next().copied());
    }
    path.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sort(list: &[(&str, &[&str])]) -> Result<Vec<String>> {
        let named: Vec<(ResourceName, Vec<ResourceName>)> =
            list.iter().map(|(n, d)| ((*n).into(), d.iter().map(|d| (*d).into()).collect())).collect();
        Ok(dependency_order(&named)?.into_iter().map(|i| named[i].0.to_string()).collect())
    }

    #[test]
    fn dependencies_come_first_and_ties_go_by_name() {
        let want = ["a", "kv", "attn", "dsa", "z"];
        let list: [(&str, &[&str]); 5] =
            [("z", &[]), ("dsa", &["attn", "kv"]), ("attn", &["kv"]), ("kv", &["a"]), ("a", &[])];
        assert_eq!(sort(&list).unwrap(), want);
        let mut reversed = list;
        reversed.reverse();
        assert_eq!(sort(&reversed).unwrap(), want, "the order in which a spec lists them must not matter");
        assert!(sort(&[]).unwrap().is_empty());
    }

    #[test]
    fn a_cycle_is_refused_with_its_path() {
        let said = sort(&[("a", &[]), ("b", &["c"]), ("c", &["d"]), ("d", &["b", "a"])]).unwrap_err();
        assert_eq!(said.to_string(), "resources depend on each other in a circle: b -> c -> d -> b");
        assert!(sort(&[("a", &["a"])]).unwrap_err().to_string().ends_with("a -> a"));
        // A resource that merely leads into the circle is not part of the path.
        assert!(
            sort(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])])
                .unwrap_err()
                .to_string()
                .ends_with("b -> c -> b")
        );
    }

    #[test]
    fn a_missing_name_is_refused_with_those_there_are() {
        let said = sort(&[("attn", &["kw"]), ("kv", &[])]).unwrap_err().to_string();
        assert_eq!(said, "attn depends on kw, which does not exist; there are: kv");
        assert!(matches!(sort(&[("kv", &[]), ("kv", &[])]), Err(Error::DuplicateResource { .. })));
    }
}
